"""Engine replicas on Ray Serve, and the client that gateways have of them."""
