"""A cluster under a virtual clock: the same `Control`, driven by discrete events instead of machines."""
