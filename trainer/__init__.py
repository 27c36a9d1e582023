"""The trainer: a frozen target produces hidden states, drafter workers learn from them."""
