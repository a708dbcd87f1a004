"""What a training step does with gradients in every framework: decided here once, carried out by the adapters above.

``arguments`` checks what users pass, ``grouping`` tells what travels as one operation. No file here imports a framework:
a gradient is a place in a list, a parameter is whatever an adapter takes gradients of.
"""
