//! A queue for places where most queues are empty.

use std::collections::VecDeque;

/// A first-in, first-out queue that is no larger than a pointer while it is empty.
#[derive(Debug)]
#[allow(clippy::box_collection, reason = "a hundred thousand empty ones are held")]
pub(crate) struct LazyQueue<T>(Option<Box<VecDeque<T>>>);

impl<T> Default for LazyQueue<T> {
    fn default() -> Self {
        LazyQueue(None)
    }
}

impl<T> LazyQueue<T> {
    pub(crate) fn push_back(&mut self, item: T) {
        self.0.get_or_insert_default().push_back(item);
    }

    pub(crate) fn front(&self) -> Option<&T> {
        self.0.as_ref()?.front()
    }

    pub(crate) fn pop_front(&mut self) -> Option<T> {
        self.remove(0)
    }

    pub(crate) fn remove(&mut self, index: usize) -> Option<T> {
        let items = self.0.as_mut()?;
        let item = items.remove(index);
        if items.is_empty() {
            self.0 = None;
        }
        item
    }

    pub(crate) fn get_mut(&mut self, index: usize) -> Option<&mut T> {
        self.0.as_mut()?.get_mut(index)
    }

    pub(crate) fn retain(&mut self, keep: impl FnMut(&T) -> bool) {
        if let Some(items) = &mut self.0 {
            items.retain(keep);
            if items.is_empty() {
                self.0 = None;
            }
        }
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = &T> {
        self.0.iter().flat_map(|items| items.iter())
    }

    pub(crate) fn len(&self) -> usize {
        self.0.as_ref().map_or(0, |items| items.len())
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.0.is_none()
    }
}
