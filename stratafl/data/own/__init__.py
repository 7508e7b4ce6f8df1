"""A user's own data, in the forms that are common: tables, arrays, folders of images, Hugging
Face's."""
