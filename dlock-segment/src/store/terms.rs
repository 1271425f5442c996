//! The terms of an inventory.

use dlock::Key;

use super::View;
use crate::error::{Error, Result};

/// The terms that an inventory is made with.
#[derive(Clone, Debug, PartialEq, Eq)]
#[allow(missing_docs, reason = "the fields are named like what they hold")]
pub struct Terms {
    pub stock: u64,
    pub segments: u32,
    /// The largest number of units that a buyer may have; 0 means any number.
    pub per_buyer: u64,
    /// In milliseconds of Unix time by the store's clock; 0 means no bound.
    pub opens_at: u64,
    pub closes_at: u64,
    /// In milliseconds.
    pub retention: u64,
    /// How many entries the journal keeps at least; 0 means that there is no journal.
    pub journal: u64,
    /// The homes of the sale, if it has several: the same text in each of them.
    pub directory: String,
}

impl Terms {
    /// The terms as one string, to be compared.
    pub(crate) fn to_comparable(&self) -> String {
        let numbers = self.numbers().map(|number| number.to_string()).join(" ");
        match &*self.directory {
            "" => numbers,
            directory => format!("{numbers} {directory}"),
        }
    }

    /// Stock, segments, limit per buyer, opening times, retention and journal.
    pub(crate) fn numbers(&self) -> [u64; 7] {
        let Terms { stock, segments, per_buyer, opens_at, closes_at, retention, journal, .. } =
            *self;
        [stock, segments.into(), per_buyer, opens_at, closes_at, retention, journal]
    }

    /// Decodes what [`to_comparable`](Self::to_comparable) made.
    pub(crate) fn from_comparable(text: &str) -> Option<Self> {
        let mut words = text.splitn(8, ' ');
        let mut number = || words.next()?.parse::<u64>().ok();
        let (stock, segments, per_buyer) = (number()?, number()?, number()?);
        let (opens_at, closes_at, retention, journal) =
            (number()?, number()?, number()?, number()?);
        let segments = u32::try_from(segments).ok()?;
        let directory = words.next().unwrap_or_default().to_owned();
        Some(Terms {
            stock,
            segments,
            per_buyer,
            opens_at,
            closes_at,
            retention,
            journal,
            directory,
        })
    }

    /// Checks that these terms may open an inventory that was made with other ones. A term
    /// that changed since then (by a resize, say) may be given as it was or as it is.
    pub(crate) fn check(&self, key: &Key, made: &Terms, view: &View) -> Result<()> {
        let terms = [
            ("stock", self.stock, made.stock, made.stock),
            ("segments", self.segments.into(), made.segments.into(), view.segments.into()),
            ("per_buyer", self.per_buyer, made.per_buyer, view.per_buyer),
            ("opens_at", self.opens_at, made.opens_at, view.opens_at),
            ("closes_at", self.closes_at, made.closes_at, view.closes_at),
            ("retention (ms)", self.retention, made.retention, view.numbering.retention),
            ("journal", self.journal, made.journal, made.journal),
        ];
        let differ = terms.iter().filter(|(_, given, made, is)| given != made && given != is);
        let mut differ: Vec<String> =
            differ.map(|(term, given, _, is)| format!("{term} is {is}, not {given}")).collect();
        if self.directory != made.directory {
            differ.push("it has other homes".into());
        }
        if differ.is_empty() {
            return Ok(());
        }
        Err(Error::Conflict(format!(
            "there is an inventory `{}` with other terms: {}; nothing was changed; open() it to use it as it is",
            key.label(),
            differ.join(", ")
        )))
    }
}
