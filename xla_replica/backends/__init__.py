"""`Replica`, its verbs on every backend, and how `current` finds one."""
