"""The sidecar: receives snapshots, keeps a journal, evaluates definitions, feeds Prometheus and W&B."""
