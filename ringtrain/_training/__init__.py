"""What a step does with samples and gradients, whatever the framework: the ways of training, and what each cannot be combined with."""
