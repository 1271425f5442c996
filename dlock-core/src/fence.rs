//! The check of fencing tokens that a resource makes.

use crate::claim::Token;

/// The kind of lock under which a resource is accessed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Access {
    /// A mutex or the write side of a read-write lock.
    Exclusive,
    /// The read side of a read-write lock.
    Shared,
}

/// The check with which a resource rejects a holder that lost its lock.
///
/// No lock service can stop a process that was paused while it held the lock and
/// wakes up after somebody else acquired it. The resource can: it keeps two numbers
/// and accepts
/// - an exclusive access whose token is not lower than the last exclusive one and
///   higher than every shared one;
/// - a shared access whose token is higher than the last exclusive one.
///
/// ```
/// use dlock::{Access, Fence, Token};
/// let mut fence = Fence::default();
/// let old = Token::new(41).unwrap();
/// let new = Token::new(42).unwrap();
/// assert!(fence.pass(Access::Exclusive, new));
/// assert!(!fence.pass(Access::Exclusive, old), "a stale holder is rejected");
/// ```
///
/// The same check in a database, with the two numbers in the row of the data
/// (`docs/fencing.md` has the whole example):
///
/// ```sql
/// UPDATE orders SET state = $1, fence = $2
///  WHERE id = $3 AND fence <= $2 AND fence_shared < $2   -- no row: stale
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Fence {
    exclusive: u64,
    shared: u64,
}

impl Fence {
    /// Whether the resource should accept this access. If so, its token is remembered.
    #[must_use]
    pub fn pass(&mut self, access: Access, token: Token) -> bool {
        let token = token.get();
        match access {
            Access::Exclusive if token >= self.exclusive && token > self.shared => {
                self.exclusive = token;
                true
            }
            Access::Shared if token > self.exclusive => {
                self.shared = self.shared.max(token);
                true
            }
            _ => false,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use Access::{Exclusive, Shared};

    fn run(steps: &[(Access, u64, bool)]) {
        let mut fence = Fence::default();
        for (n, &(access, token, passes)) in steps.iter().enumerate() {
            assert_eq!(fence.pass(access, Token::new(token).unwrap()), passes, "step {n}");
        }
    }

    #[test]
    fn writers() {
        run(&[
            (Exclusive, 5, true),
            (Exclusive, 5, true),
            (Exclusive, 6, true),
            (Exclusive, 5, false),
        ]);
    }

    #[test]
    fn readers_and_writers() {
        run(&[
            (Exclusive, 5, true),
            (Shared, 5, false),
            (Shared, 8, true),
            (Shared, 6, true), // an older reader that no writer has overtaken
            (Exclusive, 7, false),
            (Exclusive, 8, false),
            (Exclusive, 9, true),
            (Shared, 8, false),
        ]);
    }

    /// As doubles the two largest tokens and their neighbours would be told
    /// apart too, but one above they would not: hence the bound.
    #[test]
    fn exact_up_to_the_largest_token() {
        let max = Token::MAX.get();
        run(&[(Exclusive, max, true), (Exclusive, max - 1, false)]);
        assert!(Token::new(max + 1).is_none());
        assert_eq!(max as f64 as u64, max);
        assert_eq!((max + 2) as f64 as u64, max + 1, "a double cannot hold what is above");
    }
}
