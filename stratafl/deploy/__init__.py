"""The same rules on real processes: leaves, aggregators and a root that exchange messages.

protocol/   what nodes say to each other and make of it: leaf, aggregator and root as state machines
notes/      what a site's processes let know: logs, and boards in memory that they share
sites/      a site's folder, from a topology to a node with its keys, its data and its state on disk
news/       what is wrong at a site, on its way to the root
door/       who is let in at a port, how much and for how long
flower/     the transport: a site's own process, its SuperLink and its SuperNode
host/       a host's sites, watched over and started again
"""
