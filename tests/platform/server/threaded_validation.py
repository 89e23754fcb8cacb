"""A validation in a process with a second thread, for which a system-call filter would not hold."""

import threading

from loraplex.adapters.validation.validate import validate_files

__all__ = ["validate_files"]

threading.Thread(target=threading.Event().wait, daemon=True).start()
