"""The same rules on real processes: leaves, aggregators and a root that exchange messages.

job.py        what every node of a run agrees on
messages.py   what a parent and its child say to each other
upward.py     a child's side of an edge
downward.py   a parent's side of its children's edges
node.py       leaf, aggregator and root, each one or both of these
wire.py       messages as bytes, and what is refused on receipt
durable.py    a node's state on its own disk
"""
