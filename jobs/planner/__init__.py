"""Pure planning: which layouts are legal. No torch."""
