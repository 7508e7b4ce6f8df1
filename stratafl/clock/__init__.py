"""What a run costs on a network: seconds, joules, bytes and money.

`model` describes links and devices, draws them for the nodes of a tree, and has the time line of a
global round; it knows nothing of runs. `price` recomputes who took part in a stored run and what
was sent, and puts it on that time line. Training knows of neither.
"""
