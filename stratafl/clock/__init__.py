"""What a run costs on a network: seconds, joules, bytes and money.

`model` describes links and devices, draws them for the nodes of a tree, and has the time line of a
global round; it knows nothing of stored runs. `price` recomputes who took part in one and what was
sent, and puts it on that time line. Training is told who is in time, where parents wait by time.
"""
