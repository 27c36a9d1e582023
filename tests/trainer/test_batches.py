"""Batches as a pure function of their index."""

from collections import Counter

import torch

from trainer.batches import Batches
from trainer.data import Sample


def make_samples(num_samples: int) -> list[Sample]:
    """Samples of many lengths whose tokens are their own number, from 1."""
    lengths = [3 + (7 * i) % 50 for i in range(num_samples)]
    return [
        Sample(input_ids=torch.full((length,), i + 1), loss_mask=torch.arange(length) >= 2)
        for i, length in enumerate(lengths)
    ]


def epoch_ids(batches: Batches, epoch: int) -> list[list[int]]:
    """Which samples each batch of an epoch holds."""
    first = epoch * batches.num_batches_per_epoch
    return [batches.batch(first + i).input_ids[:, 0].tolist() for i in range(batches.num_batches_per_epoch)]


class TestBatches:
    """Order, access and padding."""

    def test_each_epoch_has_every_sample_once(self) -> None:
        """An epoch is a permutation of the samples, also when they do not divide into batches."""
        batches = Batches(make_samples(101), batch_size=8, seed=0)

        for epoch in range(3):
            counts = Counter(i for ids in epoch_ids(batches, epoch) for i in ids)
            assert counts == dict.fromkeys(range(1, 102), 1)

    def test_epochs_and_seeds_differ(self) -> None:
        """Each epoch and each seed has its own order."""
        samples = make_samples(64)
        first = Batches(samples, batch_size=8, seed=0)

        orders = [epoch_ids(first, 0), epoch_ids(first, 1), epoch_ids(Batches(samples, batch_size=8, seed=1), 0)]
        assert all(orders.count(order) == 1 for order in orders)

    def test_batch_depends_on_its_index_only(self) -> None:
        """Any order of access gives the same batches, so the index of the next one is all a resume needs."""
        samples = make_samples(50)
        forward = [Batches(samples, batch_size=4, seed=3).batch(i).input_ids.tolist() for i in range(40)]
        jumping = Batches(samples, batch_size=4, seed=3)

        assert [jumping.batch(i).input_ids.tolist() for i in reversed(range(40))] == forward[::-1]

    def test_pads_on_the_right(self) -> None:
        """Ids and masks are the samples' own, followed by padding that neither mask marks."""
        samples = make_samples(10)
        batch = Batches(samples, batch_size=10, seed=0).batch(0)

        assert batch.input_ids.shape[1] == max(batch.lengths)
        for row, length in enumerate(batch.lengths):
            sample = samples[int(batch.input_ids[row, 0]) - 1]
            assert batch.input_ids[row].tolist() == sample.input_ids.tolist() + [0] * (max(batch.lengths) - length)
            assert batch.loss_mask[row].nonzero()[:, 0].tolist() == list(range(2, length))
            assert batch.attention_mask[row].nonzero()[:, 0].tolist() == list(range(length))

    def test_like_lengths_go_together(self) -> None:
        """Sorting within runs leaves far less padding than batches drawn at random would have."""
        samples = make_samples(256)
        batches = Batches(samples, batch_size=8, seed=0)
        made = [batches.batch(i) for i in range(batches.num_batches_per_epoch)]
        num_slots = sum(batch.input_ids.numel() for batch in made)

        assert num_slots / sum(len(sample) for sample in samples) < 1.2

    def test_length_does_not_follow_time(self) -> None:
        """Short batches are spread over the epoch instead of coming first."""
        batches = Batches(make_samples(256), batch_size=8, seed=0)
        widths = [batches.batch(i).input_ids.shape[1] for i in range(16)]

        assert widths != sorted(widths)
        assert widths != sorted(widths, reverse=True)
