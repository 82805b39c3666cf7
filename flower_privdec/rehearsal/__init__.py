"""A whole deployment on a virtual clock, in one process: `privdec rehearse`."""
