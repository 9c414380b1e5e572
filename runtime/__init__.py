"""`Plan` to a training step: operators, the job under torchrun, and the virtual cluster that verifies a plan."""
