"""Work on requests that may take long, in a process of low priority: checking large bodies, composing large grammars."""
