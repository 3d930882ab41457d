"""What a schedule costs: exact times, bubble and memory from the price of an action, and pictures of them."""
