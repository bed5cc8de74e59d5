"""What the daemon tells a monitoring system: durations that it measures, metrics, and pages over HTTP."""
