//! New images: where the blocks of their disks go, and the headers and tables around these.
//!
//! Nothing is written here. [`Layout`] tells the places of blocks, which may be written in any order, and at the end gives
//! the tables and headers as bytes. [`Stream`] gives all bytes of an image whose blocks come in order.

mod blocks;
mod bytes;
mod layout;
mod options;
mod places;
mod stream;
mod vdi;
mod vhdx;
mod vmdk;
mod vpc;

pub use blocks::BlockTable;
pub use layout::Layout;
pub use options::{
    Allocation, Birth, NewImage, NewVdi, NewVhdx, NewVmdk, NewVpc, VmdkAdapter, VmdkKind, VpcSize,
};
pub use places::Part;
pub use stream::Stream;
