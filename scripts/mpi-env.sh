# Settings of Open MPI for several ranks on the cores of one machine; to be sourced. Waiting ranks give way to computing ones
# (without that they halve their speed), messages go through shared memory, and no ssh is needed, which bare machines lack.
export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
export OMPI_MCA_rmaps_base_oversubscribe=1 OMPI_MCA_mpi_yield_when_idle=1
export OMPI_MCA_pml=ob1 OMPI_MCA_btl=self,vader OMPI_MCA_plm=isolated
