use dlock_segment::{Take, segmented_lock};

#[segmented_lock(key = "stock:{sku}", segments = 20)]
async fn take(sku: u64) -> Take<u64> {
    Take::Done(sku)
}

fn main() {
    let _ = take;
}
