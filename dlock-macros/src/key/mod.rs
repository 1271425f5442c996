//! The key of a lock: the macro `key!`, and the option `key` of the attributes.

mod expand;
mod option;
mod placeholder;
mod template;
mod validate;

#[cfg(test)]
mod tests;

pub(crate) use self::option::KeySource;
pub(crate) use self::template::Template;
