"""From a described checkpoint to torch modules on a device."""
