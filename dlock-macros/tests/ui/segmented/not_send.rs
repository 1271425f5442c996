use std::cell::Cell;

use dlock_core::Result;
use dlock_segment::{Take, segmented_lock};

#[segmented_lock(key = "stock", segments = 20)]
async fn take(left: Cell<u32>) -> Result<Take<u32>> {
    left.set(left.get() - 1);
    std::future::ready(()).await;
    Ok(Take::Done(left.get()))
}

fn main() {
    fn sent(_: impl Send) {}
    sent(take(Cell::new(7)));
}
