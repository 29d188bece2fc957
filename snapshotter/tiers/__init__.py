"""Where chunks come from besides this node, behind one protocol, and the wrappers around it."""
