"""A network as a C99 program: `probmask.runtime.export_c`."""
