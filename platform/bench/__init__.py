"""Benchmarks: a load generator and the measurements behind the README's figures. Nothing here is used while serving."""
