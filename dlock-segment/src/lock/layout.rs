//! The segments of a lock, and in which order a pass offers them.

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

/// One segment.
#[derive(Clone)]
pub struct Segment(Arc<(usize, SegmentSpec)>);

/// What is said of a segment.
pub(super) struct SegmentSpec {
    pub(super) name: Option<Box<str>>,
    pub(super) weight: u32,
}

impl Segment {
    /// Its number, from 0.
    pub fn index(&self) -> usize {
        self.0.0
    }

    /// Its name, if the segments have names.
    pub fn name(&self) -> Option<&str> {
        self.0.1.name.as_deref()
    }

    /// How often it comes first, compared to the others.
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
    pub(super) fn new(key: Key, places: Vec<SegmentSpec>) -> Result<Self> {
        let invalid = |what: String| {
            Err(Error::new(ErrorKind::Invalid, Operation::Acquire).on(&key).saying(what))
        };
        if places.is_empty() || places.len() > MAX_SEGMENTS as usize {
            return invalid(format!("a segmented lock has 1 to {MAX_SEGMENTS} segments"));
        }
        let mut names: Vec<&str> =
            places.iter().filter_map(|place| place.name.as_deref()).collect();
        if names.contains(&"") {
            return invalid("a segment has an empty name".into());
        }
        names.sort_unstable();
        if names.windows(2).any(|pair| pair[0] == pair[1]) {
            return invalid("two segments have the same name".into());
        }
        if places.iter().all(|place| place.weight == 0) {
            return invalid("every segment has the weight 0; give one of them more".into());
        }
        let lock_of = |(index, place): (usize, &SegmentSpec)| match &place.name {
            Some(name) => key.part(name),
            None => key.part(&index.to_string()),
        };
        let locks = places.iter().enumerate().map(lock_of).collect::<Result<_>>()?;
        let segments = places.into_iter().enumerate().map(|place| Segment(Arc::new(place)));
        let segments = segments.collect();
        Ok(Layout { key, segments, locks })
    }

    /// Every segment once: the preferred one, then one drawn by weight, then on
    /// from there.
    pub(super) fn order(&self, preferred: Option<&str>) -> Vec<usize> {
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
        if let Some(wanted) = preferred
            && let Some(at) = order.iter().position(|&at| is_preferred(&segments[at], wanted))
        {
            order[..=at].rotate_right(1);
        }
        order
    }
}
