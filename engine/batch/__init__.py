"""The data of one step: sequences, the step plan, and its tensors."""
