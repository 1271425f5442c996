//! The counts of the segments. Invariant: supplied = available + reserved + sold
//! for each segment, and the totals are their sums.

use crate::store::{Counts, Parts};

#[derive(Debug)]
pub(crate) struct Units {
    segments: Vec<Counts>,
    /// A bit for each segment that has available units.
    stocked: Vec<u64>,
    /// How many segments each epoch had.
    sizes: Vec<u32>,
    pub(crate) total: Counts,
    /// The units that ever became available after the start.
    pub(crate) inflow: u64,
}

/// What units can be.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    Available,
    Reserved,
    Sold,
}

impl Units {
    pub(crate) fn new(stock: u64, segments: u32) -> Self {
        let mut units = Units {
            segments: vec![Counts::default(); segments as usize],
            stocked: Vec::new(),
            sizes: vec![segments],
            total: Counts::default(),
            inflow: 0,
        };
        units.total = Counts { available: stock, supplied: stock, ..Counts::default() };
        units.spread(0, stock);
        units
    }

    /// The units of segments that were counted before.
    #[cfg(any(feature = "mysql", feature = "postgres", feature = "sqlite"))]
    pub(crate) fn counted(segments: Vec<Counts>, sizes: Vec<u32>) -> Self {
        let mut total = Counts::default();
        for counts in &segments {
            total.available += counts.available;
            total.reserved += counts.reserved;
            total.sold += counts.sold;
            total.supplied += counts.supplied;
        }
        let count = segments.len();
        let mut units = Units { segments, stocked: Vec::new(), sizes, total, inflow: 0 };
        (0..count).for_each(|at| units.mark(at));
        units
    }

    pub(crate) fn segments(&self) -> &[Counts] {
        &self.segments
    }

    /// How many segments each epoch had.
    pub(crate) fn sizes(&self) -> &[u32] {
        &self.sizes
    }

    pub(crate) fn epoch(&self) -> u32 {
        self.sizes.len() as u32 - 1
    }

    /// Takes `quantity` available units, beginning with the segment `start`: from one
    /// segment if one has enough, else from several.
    pub(crate) fn take(&mut self, quantity: u64, start: usize, kind: Kind) -> Parts {
        debug_assert!(self.total.available >= quantity);
        let start = start % self.segments.len();
        let single = self.stocked_from(start).find(|&at| self.segments[at].available >= quantity);
        let mut parts = Parts::new();
        if let Some(at) = single {
            parts.push((at as u32, quantity));
        } else {
            let mut missing = quantity;
            for at in self.stocked_from(start) {
                let some = self.segments[at].available.min(missing);
                parts.push((at as u32, some));
                missing -= some;
                if missing == 0 {
                    break;
                }
            }
        }
        self.convert(self.epoch(), &parts, Kind::Available, kind);
        parts
    }

    /// Converts units of the segments of an epoch from one kind to another.
    pub(crate) fn convert(&mut self, epoch: u32, parts: &[(u32, u64)], from: Kind, to: Kind) {
        for &(segment, quantity) in parts {
            let at = self.place(epoch, segment);
            for counts in [&mut self.segments[at], &mut self.total] {
                *counts.of(from) -= quantity;
                *counts.of(to) += quantity;
            }
            self.inflow += if to == Kind::Available { quantity } else { 0 };
            self.mark(at);
        }
    }

    /// Takes sold units out of the inventory.
    pub(crate) fn write_off(&mut self, epoch: u32, parts: &[(u32, u64)]) {
        for &(segment, quantity) in parts {
            let at = self.place(epoch, segment);
            for counts in [&mut self.segments[at], &mut self.total] {
                counts.sold -= quantity;
                counts.supplied -= quantity;
            }
        }
    }

    /// Whether so many units of these segments are sold.
    pub(crate) fn are_sold(&self, epoch: u32, parts: &[(u32, u64)]) -> bool {
        let mut sold = hashbrown::HashMap::new();
        epoch <= self.epoch()
            && parts.iter().all(|&(segment, quantity)| {
                let at = self.place(epoch, segment);
                let sum = sold.entry(at).or_insert(0u64);
                *sum += quantity;
                self.segments.get(at).is_some_and(|counts| counts.sold >= *sum)
            })
    }

    /// The segment in which the units of a segment of an earlier epoch are counted now.
    pub(crate) fn place(&self, epoch: u32, segment: u32) -> usize {
        let later = self.sizes.iter().skip(epoch as usize + 1);
        later.fold(segment, |segment, &size| segment % size) as usize
    }

    /// Adds units evenly; the remainder goes to the segments from `start` on.
    pub(crate) fn restock(&mut self, start: usize, quantity: u64) -> Parts {
        self.total.available += quantity;
        self.total.supplied += quantity;
        self.inflow += quantity;
        self.spread(start, quantity)
    }

    fn spread(&mut self, start: usize, quantity: u64) -> Parts {
        let count = self.segments.len();
        let (each, odd) = (quantity / count as u64, quantity % count as u64);
        let mut parts = Parts::new();
        for step in 0..count {
            let at = (start + step) % count;
            let some = each + u64::from((step as u64) < odd);
            if some > 0 {
                self.segments[at].available += some;
                self.segments[at].supplied += some;
                parts.push((at as u32, some));
            }
            self.mark(at);
        }
        parts
    }

    /// Distributes the available units evenly.
    pub(crate) fn rebalance(&mut self) {
        for counts in &mut self.segments {
            counts.supplied -= counts.available;
            counts.available = 0;
        }
        self.spread(0, self.total.available);
    }

    /// Starts a new epoch with another number of segments.
    pub(crate) fn resize(&mut self, count: u32) {
        let before = std::mem::replace(&mut self.segments, vec![Counts::default(); count as usize]);
        for (at, counts) in before.into_iter().enumerate() {
            let into = &mut self.segments[at % count as usize];
            into.reserved += counts.reserved;
            into.sold += counts.sold;
            into.supplied += counts.reserved + counts.sold;
        }
        self.sizes.push(count);
        self.stocked.clear();
        self.spread(0, self.total.available);
    }

    fn mark(&mut self, at: usize) {
        let (word, bit) = (at / 64, 1 << (at % 64));
        if self.stocked.len() <= word {
            self.stocked.resize(word + 1, 0);
        }
        if self.segments[at].available > 0 {
            self.stocked[word] |= bit;
        } else {
            self.stocked[word] &= !bit;
        }
    }

    /// The segments that have available units, from `start` on and then from 0.
    fn stocked_from(&self, start: usize) -> impl Iterator<Item = usize> {
        let count = self.segments.len();
        self.stocked_in(start, count).chain(self.stocked_in(0, start))
    }

    fn stocked_in(&self, from: usize, to: usize) -> impl Iterator<Item = usize> {
        let mut at = from;
        std::iter::from_fn(move || {
            while at < to {
                let word = self.stocked.get(at / 64).copied().unwrap_or(0) >> (at % 64);
                if word == 0 {
                    at = (at / 64 + 1) * 64;
                    continue;
                }
                let found = at + word.trailing_zeros() as usize;
                at = found + 1;
                return (found < to).then_some(found);
            }
            None
        })
    }
}

impl Counts {
    fn of(&mut self, kind: Kind) -> &mut u64 {
        match kind {
            Kind::Available => &mut self.available,
            Kind::Reserved => &mut self.reserved,
            Kind::Sold => &mut self.sold,
        }
    }
}
