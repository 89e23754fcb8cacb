"""The layers of the decoder: thin, no state except weights, every kernel called through `engine.kernels`."""
