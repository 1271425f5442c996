//! Small data structures that the machine and the embedded backend share.

mod hash;
mod lazy_queue;
mod short_queue;

pub(crate) use hash::{Map, hash_of};
pub(crate) use lazy_queue::LazyQueue;
pub(crate) use short_queue::ShortQueue;
