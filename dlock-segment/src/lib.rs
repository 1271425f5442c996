//! For what everybody wants at once.
//!
//! - [`SegmentedLock`]: something hot of your own is split in segments, each with
//!   a lock; a task takes a free one and goes on to the next when it is dry.

mod dry;
mod lock;

pub use lock::{MAX_SEGMENTS, Segment, SegmentedLock, Segments, Take};
