"""A validation process with a second thread, for which a system-call filter would not hold."""

import threading

from loraplex.adapters import validation_child as child

if __name__ == "__main__":
    threading.Thread(target=threading.Event().wait, daemon=True).start()
    child.main()
