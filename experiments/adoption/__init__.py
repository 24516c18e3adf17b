"""How a model that exists comes to run on jaxgemm: one runnable file a library."""
