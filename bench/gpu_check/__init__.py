"""`make gpu-check`: what only a machine with an NVIDIA GPU can show, in under four minutes."""
