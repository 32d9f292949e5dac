"""Every panel's query against a real Prometheus that scrapes a control plane with two real engines."""
