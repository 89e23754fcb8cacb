"""Child processes, as `loraplex.grammar.child_process` starts them."""

from loraplex.grammar.child_process import end_child, spawn_child

__all__ = ["end_child", "spawn_child"]
