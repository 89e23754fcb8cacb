"""The torch backend: the specification of every kernel, used on devices without a backend of their own."""
