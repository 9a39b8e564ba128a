"""A simulated cluster under a virtual clock: the same `Control`, driven by discrete events, not machines."""
