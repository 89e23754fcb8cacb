"""The layers of the decoder: thin, stateless but for their weights, every kernel behind `engine.kernels`."""
