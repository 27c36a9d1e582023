"""Sources the sidecar samples itself: the GPUs, the host and the trainer process."""
