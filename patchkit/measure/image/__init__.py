"""Write what makes an image of a wheelhouse."""
