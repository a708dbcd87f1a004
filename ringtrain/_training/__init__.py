"""What a step does with gradients, whatever the framework: the ways of training, and what each cannot be combined with."""
