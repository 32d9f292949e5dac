"""The control group: requests that nothing shortens, and the probes that show what shortening would have changed."""
