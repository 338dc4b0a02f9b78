"""Local training as compiled code for the CPU: one client after the other, each in its own caches.

The stacked PyTorch code of a method says the same thing for a block of clients on any device; a CPU is spared its
memory traffic and its thousands of small calls. Draws are those of :mod:`embedding_fr.local_training`, gradients and
optimiser steps those of :mod:`embedding_fr.local_training` up to rounding; a client's result depends on nothing but the
client. :mod:`embedding_fr.local_training` and :mod:`embedding_fr.local_training` call these functions.
"""
