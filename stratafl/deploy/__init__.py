"""The same rules on real processes: leaves, aggregators and a root that exchange messages.

    job.py        what every node of a run agrees on
    messages.py   what a parent and its child say to each other
    upward.py     a child's side of an edge
    downward.py   a parent's side of its children's edges
    node.py       leaf, aggregator and root, each one or both of these
    wire.py       messages as bytes, and what is refused on receipt
    durable.py    a node's state on its own disk
    seal.py       messages that only the two ends of an edge can make
    memory.py     a tree in one process
    site.py       a site's folder; provision.py makes them, assemble.py makes a node of one, own.py reads a leaf's data
    flower.py     a node on Flower, with inbox.py towards its parent; both get their tasks.py, at a pace.py
    superlink.py  Flower's server for a site's children; supernode.py that towards its parent
    supervise.py  a site's processes.py; whole.py those of all sites of a machine

Everything down to memory.py knows nothing of Flower. What comes after needs the extra `deploy`.
"""
