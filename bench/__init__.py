"""Measurements of what telemetry costs, side by side with what one would do without it. See docs/benchmarks.md."""
