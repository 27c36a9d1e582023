"""Where evaluated metrics go: Prometheus and Weights & Biases."""
