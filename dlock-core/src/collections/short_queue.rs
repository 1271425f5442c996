//! A queue for places where most queues have one item.

use super::LazyQueue;

/// A first-in, first-out queue whose first item costs no allocation.
#[derive(Debug)]
pub(crate) struct ShortQueue<T> {
    first: Option<T>,
    rest: LazyQueue<T>,
}

impl<T> Default for ShortQueue<T> {
    fn default() -> Self {
        ShortQueue { first: None, rest: LazyQueue::default() }
    }
}

impl<T> ShortQueue<T> {
    pub(crate) fn push_back(&mut self, item: T) {
        if self.first.is_none() {
            self.first = Some(item);
        } else {
            self.rest.push_back(item);
        }
    }

    pub(crate) fn front(&self) -> Option<&T> {
        self.first.as_ref()
    }

    pub(crate) fn remove(&mut self, place: usize) -> Option<T> {
        match place.checked_sub(1) {
            Some(place) => self.rest.remove(place),
            None => std::mem::replace(&mut self.first, self.rest.pop_front()),
        }
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = &T> {
        self.first.iter().chain(self.rest.iter())
    }

    pub(crate) fn len(&self) -> usize {
        usize::from(self.first.is_some()) + self.rest.len()
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.first.is_none()
    }
}
