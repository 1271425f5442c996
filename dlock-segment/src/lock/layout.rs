//! The segments of a lock, and the order in which a pass offers them.

use std::fmt;
use std::sync::Arc;

use dlock::{Error, ErrorKind, Key, Operation, Result};
use rand::RngExt as _;

use super::MAX_SEGMENTS;

/// The key and its segments.
pub(super) struct Layout {
    pub(super) key: Key,
    pub(super) segments: Vec<Segment>,
    pub(super) locks: Vec<Key>,
}

/// One segment of a [`SegmentedLock`](crate::SegmentedLock).
#[derive(Clone)]
pub struct Segment(Arc<(usize, SegmentSpec)>);

/// How a segment was declared.
pub(super) struct SegmentSpec {
    pub(super) name: Option<Box<str>>,
    pub(super) weight: u32,
}

impl Segment {
    /// The number of the segment, from 0.
    pub fn index(&self) -> usize {
        self.0.0
    }

    /// The name of the segment, if the segments have names.
    pub fn name(&self) -> Option<&str> {
        self.0.1.name.as_deref()
    }

    /// The weight of the segment: how often it comes first, compared to the others.
    pub fn weight(&self) -> u32 {
        self.0.1.weight
    }
}

impl fmt::Debug for Segment {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Segment({}", self.index())?;
        if let Some(name) = self.name() {
            write!(f, " {name}")?;
        }
        f.write_str(")")
    }
}

impl Layout {
    pub(super) fn new(key: Key, specs: Vec<SegmentSpec>) -> Result<Self> {
        let invalid = |what: String| {
            Err(Error::new(ErrorKind::Invalid, Operation::Acquire)
                .with_key(&key)
                .with_message(what))
        };
        if specs.is_empty() || specs.len() > MAX_SEGMENTS as usize {
            return invalid(format!("a segmented lock has 1 to {MAX_SEGMENTS} segments"));
        }
        let mut names: Vec<&str> = specs.iter().filter_map(|spec| spec.name.as_deref()).collect();
        if names.contains(&"") {
            return invalid("a segment has an empty name".into());
        }
        names.sort_unstable();
        if names.windows(2).any(|pair| pair[0] == pair[1]) {
            return invalid("two segments have the same name".into());
        }
        if specs.iter().all(|spec| spec.weight == 0) {
            return invalid("every segment has the weight 0; give one of them more".into());
        }
        let lock_of = |(index, spec): (usize, &SegmentSpec)| match &spec.name {
            Some(name) => key.part(name),
            None => key.part(&index.to_string()),
        };
        let locks = specs.iter().enumerate().map(lock_of).collect::<Result<_>>()?;
        let segments = specs.into_iter().enumerate().map(|spec| Segment(Arc::new(spec)));
        let segments = segments.collect();
        Ok(Layout { key, segments, locks })
    }

    /// Every segment once: the preferred one, then a random one by weight, then the ones
    /// that follow it.
    ///
    /// # Errors
    /// `Invalid` if no segment has the preferred name or number.
    pub(super) fn order(&self, preferred: Option<&str>) -> Result<Vec<usize>> {
        let segments = &self.segments;
        let weights = segments.iter().map(|segment| u64::from(segment.weight()));
        let mut drawn = rand::rng().random_range(0..weights.clone().sum());
        let mut start = 0;
        for (index, weight) in weights.enumerate() {
            start = index;
            if drawn < weight {
                break;
            }
            drawn -= weight;
        }
        let mut order: Vec<usize> = (start..segments.len()).chain(0..start).collect();
        let is_preferred = |segment: &Segment, wanted: &str| match segment.name() {
            Some(name) => name == wanted,
            None => segment.index().to_string() == wanted,
        };
        if let Some(wanted) = preferred {
            let position = order.iter().position(|&at| is_preferred(&segments[at], wanted));
            let Some(at) = position else {
                return Err(Error::new(ErrorKind::Invalid, Operation::Acquire)
                    .with_key(&self.key)
                    .with_message(format!(
                        "`prefer` names the segment {wanted:?}, which does not exist; give the name of a segment, or its number from 0 if the segments have no names"
                    )));
            };
            order[..=at].rotate_right(1);
        }
        Ok(order)
    }
}
