"""One drafter step - forward, loss, backward, optimizer - of ours and of other trainers, on equal terms."""
